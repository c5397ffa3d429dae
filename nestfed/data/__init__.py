"""Examples: named data sets, who holds what, and the batches that clients draw."""
