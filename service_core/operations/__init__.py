"""Running the two services: checks of a machine, health, logs, exit statuses."""
