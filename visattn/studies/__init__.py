"""Studies: photos under models, with all that was recorded and computed of them, in one object and in one file.

`study` makes one from a model and images. `Study.save` writes it as an `.attn` file, which `load_study` reads without the model.
"""

from visattn.studies.captions import caption_study
from visattn.studies.creation import study
from visattn.studies.reading import load_study
from visattn.studies.views import Study, View

__all__ = ["Study", "View", "caption_study", "load_study", "study"]
