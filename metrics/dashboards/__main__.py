"""Write the dashboards into their files."""

from metrics.dashboards.written import FOLDER, written

if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file, text in written().items():
        file.write_text(text)
