"""Operations that come with Windlass; a worker runs those that its configuration names."""
