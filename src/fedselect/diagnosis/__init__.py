"""Where clients differ: a few rounds of sharing everything, then a table, a picture and sentences."""
