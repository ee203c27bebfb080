"""What `chunkattn flips` measures: whether a server's answers depend on cache, company, order or load."""
