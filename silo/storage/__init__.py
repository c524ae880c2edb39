"""What a hospital stores: the home folder, the database, the outbox."""
