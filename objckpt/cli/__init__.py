"""The command line. Only here are environment variables of objckpt read."""
