"""The URLs of the shop."""

from django.urls import path

from shop.views import create_order, show_order

urlpatterns = [path("orders", create_order), path("orders/<int:id>", show_order)]
