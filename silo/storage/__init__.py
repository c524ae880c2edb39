"""The hospital's disk: home folder, database, objects, outbox."""
