"""What the coordinator keeps. Each method of a store is one transaction, on disk when it returns."""
