"""The hospital's storage: the home folder, the database, the outbox."""
