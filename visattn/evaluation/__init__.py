"""Quantitative evaluation of maps and attention.

Statistics of heads, gates and sinks; scores of how well a map localizes an object, and of how well it tells what a score depends on; maps
that know nothing, to compare with.
"""

from typing import TYPE_CHECKING

from visattn._support.faces import face

if TYPE_CHECKING:
    from visattn.core.methods.sinks import (
        attention_received as attention_received,
        find_sinks as find_sinks,
        sink_mass as sink_mass,
    )
    from visattn.evaluation.agreement import SensitivityN as SensitivityN, saco as saco, sensitivity_n as sensitivity_n
    from visattn.evaluation.baselines import (
        center_prior as center_prior,
        edge_map as edge_map,
        flipped_copies as flipped_copies,
        shifted_copies as shifted_copies,
        smooth_random as smooth_random,
    )
    from visattn.evaluation.causes.bench import find_causes as find_causes
    from visattn.evaluation.causes.findings import Causes as Causes, Findings as Findings
    from visattn.evaluation.checking import Check as Check, check as check
    from visattn.evaluation.curves import (
        Curve as Curve,
        deletion as deletion,
        insertion as insertion,
        perturbation as perturbation,
    )
    from visattn.evaluation.effects_of_heads import HeadEffects as HeadEffects, head_effects as head_effects
    from visattn.evaluation.evaluating import Evaluator as Evaluator, evaluate as evaluate
    from visattn.evaluation.explaining import Explainer as Explainer
    from visattn.evaluation.given import MaskLike as MaskLike, as_mask as as_mask
    from visattn.evaluation.heads import (
        HeadStatistics as HeadStatistics,
        head_divergence as head_divergence,
        statistics as statistics,
    )
    from visattn.evaluation.importance import head_ablation as head_ablation, head_importance as head_importance
    from visattn.evaluation.imputation import Road as Road, road as road
    from visattn.evaluation.intervals import mean_interval as mean_interval
    from visattn.evaluation.localization import (
        auroc as auroc,
        average_precision as average_precision,
        energy_inside as energy_inside,
        lift as lift,
        pointing_game as pointing_game,
    )
    from visattn.evaluation.map_numbers import Evaluation as Evaluation, MapNumbers as MapNumbers
    from visattn.evaluation.metric_table import (
        LOCATED as LOCATED,
        METRICS as METRICS,
        Metric as Metric,
        Protocol as Protocol,
        is_higher_better as is_higher_better,
    )
    from visattn.evaluation.nulls import NULLS as NULLS, nulls_of as nulls_of
    from visattn.evaluation.patches import Patches as Patches, patches_by_layout as patches_by_layout
    from visattn.evaluation.patching_heads import PatchedHeads as PatchedHeads, patched_heads as patched_heads
    from visattn.evaluation.permutation import (
        AttentionPermutation as AttentionPermutation,
        attention_permutation as attention_permutation,
    )
    from visattn.evaluation.randomization import (
        Cascade as Cascade,
        cascading_randomization as cascading_randomization,
        flip_equivariance as flip_equivariance,
    )
    from visattn.evaluation.rank_statistics import MeanRanks as MeanRanks, mean_ranks as mean_ranks
    from visattn.evaluation.robustness_of_maps import Robustness as Robustness, robustness as robustness
    from visattn.evaluation.segmentation import (
        Segmentation as Segmentation,
        SegmentationScores as SegmentationScores,
        best_head_jaccard as best_head_jaccard,
    )
    from visattn.evaluation.specialization import (
        NULL_DRAWS as NULL_DRAWS,
        HeadScores as HeadScores,
        PropertyScores as PropertyScores,
        find_heads as find_heads,
        over_patches as over_patches,
        score_heads as score_heads,
    )
    from visattn.evaluation.statistics_of_gates import GateStatistics as GateStatistics, gate_statistics as gate_statistics
    from visattn.evaluation.survey import (
        LayerNumbers as LayerNumbers,
        PhotoNumbers as PhotoNumbers,
        Survey as Survey,
        photo_numbers as photo_numbers,
    )
    from visattn.evaluation.survey_output import survey_files as survey_files
    from visattn.evaluation.through_captum import infidelity as infidelity, max_sensitivity as max_sensitivity
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "visattn.core.methods.sinks": ["attention_received", "find_sinks", "sink_mass"],
            ".agreement": ["SensitivityN", "saco", "sensitivity_n"],
            ".baselines": ["center_prior", "edge_map", "flipped_copies", "shifted_copies", "smooth_random"],
            ".causes.bench": ["find_causes"],
            ".causes.findings": ["Causes", "Findings"],
            ".checking": ["Check", "check"],
            ".curves": ["Curve", "deletion", "insertion", "perturbation"],
            ".statistics_of_gates": ["GateStatistics", "gate_statistics"],
            ".evaluating": ["Evaluator", "evaluate"],
            ".explaining": ["Explainer"],
            ".map_numbers": ["Evaluation", "MapNumbers"],
            ".metric_table": ["LOCATED", "METRICS", "Metric", "Protocol", "is_higher_better"],
            ".nulls": ["NULLS", "nulls_of"],
            ".given": ["MaskLike", "as_mask"],
            ".effects_of_heads": ["HeadEffects", "head_effects"],
            ".heads": ["HeadStatistics", "head_divergence", "statistics"],
            ".importance": ["head_ablation", "head_importance"],
            ".imputation": ["Road", "road"],
            ".through_captum": ["infidelity", "max_sensitivity"],
            ".intervals": ["mean_interval"],
            ".localization": ["auroc", "average_precision", "energy_inside", "lift", "pointing_game"],
            ".patching_heads": ["PatchedHeads", "patched_heads"],
            ".patches": ["Patches", "patches_by_layout"],
            ".permutation": ["AttentionPermutation", "attention_permutation"],
            ".randomization": ["Cascade", "cascading_randomization", "flip_equivariance"],
            ".rank_statistics": ["MeanRanks", "mean_ranks"],
            ".robustness_of_maps": ["Robustness", "robustness"],
            ".segmentation": ["Segmentation", "SegmentationScores", "best_head_jaccard"],
            ".specialization": ["NULL_DRAWS", "HeadScores", "PropertyScores", "find_heads", "over_patches", "score_heads"],
            ".survey": ["LayerNumbers", "PhotoNumbers", "Survey", "photo_numbers"],
            ".survey_output": ["survey_files"],
        },
    )
