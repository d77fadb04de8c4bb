"""The deployment on Flower: its apps and processes. Only `apps` imports flwr; `guard` loads its programs by name."""
