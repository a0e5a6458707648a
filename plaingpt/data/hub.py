"""Downloads data sets of the Hugging Face hub."""

from pathlib import Path

from plaingpt.base.errors import explaining, require


def load_hub(dataset, name=None, split="train", patient=True):
    """Downloads a data set -> (its Arrow files in the cache, number of rows, revision).

    patient: if False, and the hub does not answer in five seconds, only the cache is used.
    `datasets` itself would wait for minutes. Raises UserError.
    """
    datasets = require("datasets")
    import requests  # `datasets` needs this package, too

    if not (patient or datasets.config.HF_HUB_OFFLINE):
        try:
            requests.head(datasets.config.HF_ENDPOINT, timeout=5)
        except requests.RequestException:
            datasets.config.HF_HUB_OFFLINE = True  # stays so until this program ends
    # Network errors come from several libraries.
    with explaining(f"{dataset}: cannot be loaded", "check name, network, HF_ENDPOINT"):
        data = datasets.load_dataset(dataset, name, split=split)
    files = [Path(file["filename"]) for file in data.cache_files]
    return files, data.num_rows, files[0].parent.name if files else None
