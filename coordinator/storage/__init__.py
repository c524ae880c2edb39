"""What is kept: SQLite tables and transactions, the object store, uploads under way."""
