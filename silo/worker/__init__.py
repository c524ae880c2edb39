"""The sandboxed process that reads a hospital's records. The service has network access and reads no records."""
