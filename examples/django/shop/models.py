"""The tables of the shop."""

from django.db import models


class Order(models.Model):
    """An order; its receipt is written by a job."""

    email = models.EmailField()
    total = models.DecimalField(max_digits=10, decimal_places=2)
    receipt = models.TextField(default="")
