"""A federation over a real network: letters, clients, server, vaults and sites; flower/ is what knows Flower."""
