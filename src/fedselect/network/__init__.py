"""Federations over a real network: messages, clients, server, vaults and sites. flower/ and grpc/ are the two transports."""
