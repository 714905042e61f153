"""A shop on Django: each order is stored together with the job that writes its receipt."""
