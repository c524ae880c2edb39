"""What a hospital keeps: the home folder, the database, the outbox."""
