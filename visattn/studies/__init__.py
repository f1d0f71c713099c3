"""Studies: photos under models, with all that was recorded and computed of them, in one object and in one file.

`study` makes one from a model and images. `Study.save` writes it as an `.attn` file, which `load_study` reads without the model.
"""

from typing import TYPE_CHECKING

from visattn._support.faces import face

if TYPE_CHECKING:
    from visattn.studies.attn_reading import load_study as load_study
    from visattn.studies.attn_writing import attn_content as attn_content
    from visattn.studies.captions import caption_study as caption_study
    from visattn.studies.making import study as study, view_of as view_of
    from visattn.studies.sequence import Study as Study
    from visattn.studies.study_page import html_of as html_of
    from visattn.studies.views import View as View
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            ".captions": ["caption_study"],
            ".making": ["study", "view_of"],
            ".attn_reading": ["load_study"],
            ".sequence": ["Study"],
            ".study_page": ["html_of"],
            ".views": ["View"],
            ".attn_writing": ["attn_content"],
        },
    )
