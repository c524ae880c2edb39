"""What a round on kept features of a frozen body costs, in seconds and bytes."""
