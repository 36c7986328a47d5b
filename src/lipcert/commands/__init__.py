"""What the commands do, between the parsed arguments and the printed tables."""
