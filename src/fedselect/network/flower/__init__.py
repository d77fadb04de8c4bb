"""The deployment on Flower: its apps and processes. `apps` alone imports flwr; `guard` loads its programs by name."""
