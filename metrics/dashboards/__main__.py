"""Write the dashboards into their files."""

from forgekeeper.delivery.broker import load_batches
from metrics.dashboards.written import FOLDER, written

if __name__ == "__main__":
    load_batches()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file, text in written().items():
        file.write_text(text)
