"""The deployment on plain gRPC with mutual TLS. `hub` (server) and `line` (client) alone import grpc, when one starts."""
