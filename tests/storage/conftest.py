from tests.harness.stores import empty_s3, folder, moto, objects, s3, s3_client, store

__all__ = ["empty_s3", "folder", "moto", "objects", "s3", "s3_client", "store"]
