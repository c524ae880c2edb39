"""What one local step of FedMR costs beside one of FedAvg."""
