"""Django's settings; Batchwright uses the same database."""

import os

from psycopg.conninfo import conninfo_to_dict

_database = conninfo_to_dict(os.environ["BATCHWRIGHT_DATABASE_URL"])

SECRET_KEY = os.environ.get("DJANGO_SECRET_KEY", "only for this example")
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
INSTALLED_APPS = ["shop"]
ROOT_URLCONF = "shop.urls"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",  # with psycopg 3, which comes with Batchwright
        "NAME": _database["dbname"],
        "USER": _database.get("user", ""),
        "PASSWORD": _database.get("password", ""),
        "HOST": _database.get("host", ""),
        "PORT": _database.get("port", ""),
    }
}
