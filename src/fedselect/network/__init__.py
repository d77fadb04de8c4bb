"""A federation over a real network: letters, clients, server, vaults and sites; flower/ and grpc/ know what carries them."""
