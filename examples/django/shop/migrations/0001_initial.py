"""The table of orders."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """Created by `python manage.py makemigrations`."""

    initial = True
    dependencies = []
    operations = [
        migrations.CreateModel(
            name="Order",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("email", models.EmailField(max_length=254)),
                ("total", models.DecimalField(decimal_places=2, max_digits=10)),
                ("receipt", models.TextField(default="")),
            ],
        ),
    ]
