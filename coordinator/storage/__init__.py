"""The coordinator's database and unfinished uploads. Each method of a store is one transaction, on disk on return."""
