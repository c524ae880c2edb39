"""What epsilon allows an attacker, drawn beside what attacks have found."""
