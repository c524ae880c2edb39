"""What reads a hospital's records: a process of its own in a cage. The service, which has the network, reads none."""
