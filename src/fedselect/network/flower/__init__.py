"""The deployment on Flower: configuration, run directories, sites, processes and commands; `apps` and `guard` import flwr."""
