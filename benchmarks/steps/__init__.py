"""What a local step costs: FedMR's beside FedAvg's, a private one beside a plain one and beside bare Opacus."""
