"""Named datasets, tables, partitions over clients, and the batches that clients draw."""
