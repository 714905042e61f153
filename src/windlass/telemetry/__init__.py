"""What Windlass tells about itself."""
