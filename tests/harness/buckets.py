"""Buckets: what tests of them share."""

from datetime import timedelta

import redis

MINUTE = timedelta(minutes=1)


class Lossy(redis.Redis):
    """A client that gets no reply to its next *lose* scripts, though the server runs them."""

    lose = 0

    def __init__(self, **parameters):
        super().__init__(**parameters)
        self.sent = []

    def execute_command(self, *args, **options):
        reply = super().execute_command(*args, **options)
        if args[0] == "EVALSHA":
            self.sent.append(args)
            if self.lose:
                self.lose -= 1
                raise redis.TimeoutError("the reply was lost")
        return reply
