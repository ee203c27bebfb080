from tests.posted_parts import posted_parts as posted_parts
