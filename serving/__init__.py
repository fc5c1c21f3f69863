"""What `server.py` is made of: the OpenAI-shaped HTTP service over an `ImageService`."""
