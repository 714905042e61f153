"""PostgreSQL: connections, statements, migrations, the doorbell and the embedded server."""
