"""Methods on the same frozen features of real skin lesions: rounds, bytes, seconds, balanced accuracy, AUC."""
