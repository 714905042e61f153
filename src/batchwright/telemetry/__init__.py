"""What Batchwright tells about itself."""
