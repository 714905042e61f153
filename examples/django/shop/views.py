"""The pages of the shop."""

import json
from functools import cache

from django.db import connection, transaction
from django.http import HttpRequest, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from batchwright import Batchwright
from shop.models import Order


@cache
def batchwright() -> Batchwright:
    """One client per process, opened on first use: a server that forks must not open one before it forks."""
    return Batchwright().open()


class Declined(Exception):
    """The bank declines the payment."""


@csrf_exempt  # an API without cookies
@require_POST
def create_order(request: HttpRequest) -> JsonResponse:
    """Store the order and its job in one transaction: either both exist after it, or neither."""
    data = json.loads(request.body)
    try:
        with transaction.atomic():
            order = Order.objects.create(email=data["email"], total=data["total"])
            job = batchwright().enqueue("write_receipt", {"order_id": order.pk}, connection=connection)
            charge(order)
    except Declined as error:
        return JsonResponse({"error": str(error)}, status=402)
    return JsonResponse({"order": order.pk, "job": str(job)}, status=201)


def show_order(request: HttpRequest, id: int) -> JsonResponse:
    order = get_object_or_404(Order, pk=id)
    return JsonResponse({"order": order.pk, "receipt": order.receipt})


def charge(order: Order) -> None:
    if order.total > 1000:
        raise Declined(f"{order.total} is more than the card allows")
