"""Open-loop load for `chunkattn bench serve`: requests arrive at a rate, whether or not earlier ones were answered."""
