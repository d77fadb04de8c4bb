"""Which method and which settings suit a federation: tried side by side on validation data, the weaker ones dropped early."""
