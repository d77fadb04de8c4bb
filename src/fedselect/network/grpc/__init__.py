"""The deployment on plain gRPC with mutual TLS. Only `hub` (server) and `line` (client) import grpc, when one starts."""
