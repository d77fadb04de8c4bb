"""What travels between clients and server, and how many bytes it is: both runtimes count with the same codec."""
