"""Operations that come with Batchwright; a worker runs those that its configuration names."""
