"""What a worker process is: its boot, its middleware, its shutdown."""
