"""The words of the page, in English and in Chinese."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Literal

from fedloom.core.vocabulary import SPREAD, meaning
from fedloom.report.page.claims_zh import CHINESE_CLAIMS, NUMERALS

Language = Literal["en", "zh"]
Say = Callable[[str], str]

# English on the left is also the key. What is not listed (names, settings) is not translated.
_CHINESE = {
    "fedloom report": "fedloom 报告",
    "Run": "单次运行",
    "Comparison": "方法对比",
    "Overview of runs": "运行总览",
    "Contents": "目录",
    "Skip to the content": "跳到正文",
    "Results": "结果",
    "Claims": "论文结论核验",
    "Curves": "训练曲线",
    "Clients": "客户端",
    "Partition": "数据划分",
    "partition": "数据划分",
    "Confusion matrix": "混淆矩阵",
    "Topology": "网络拓扑",
    "Communication and time": "通信量与耗时",
    "Privacy": "差分隐私",
    "Settings": "参数设置",
    "Environment": "运行环境",
    "Progress": "进度",
    "Log": "日志",
    # states
    "done": "已完成",
    "diverged": "已发散",
    "failed": "失败",
    "missing": "未运行",
    "unfinished": "未完成",
    "state": "状态",
    # headings of tables and cards
    "name": "名称",
    "algorithm": "算法",
    "method": "方法",
    "data": "数据集",
    "clients": "客户端数",
    "client": "客户端",
    "model": "模型",
    "rounds": "轮数",
    "round": "轮次",
    "seed": "随机种子",
    "{} seeds": "{} 个种子",
    "{}/{} seeds": "{}/{} 个种子",
    "seeds": "随机种子数",
    "metric": "指标",
    "last": "最终值",
    "best": "最优值",
    "mean of last 10": "最后十次均值",
    "mean of at most 10": "最后至多十次均值",
    "mean of all {}": "全部 {} 次均值",
    "mean of one": "仅一次的值",
    "rank": "排名",
    "difference": "与基线之差",
    "95 % interval": "95% 置信区间",
    "p": "p 值",
    "validation": "验证集",
    "chosen": "选定",
    "chosen by validation": "按验证集选定",
    "in the paper's layout": "按论文表格的版式",
    "paper": "论文数值",
    "baseline": "基线",
    "rounds to target": "达到目标的轮数",
    "verdict": "结论",
    "claim": "论文说法",
    "source": "出处",
    "differences": "差值（95% 置信区间）",
    "holds": "成立",
    "does not hold": "不成立",
    "undecided": "无法判定",
    "not run": "尚未运行",
    "no run reached the target": "没有运行达到目标",
    "no seed has this number": "没有种子有此数值",
    "seeds lost": "失败的种子",
    "one seed": "仅一个种子",
    "rows": "样本数",
    "classes": "类别数",
    "largest class": "最多的类别",
    "lowest tenth": "最差 10%",
    "accuracy": "准确率",
    "loss": "损失",
    "bins": "分箱数",
    "largest bin": "最多的分箱",
    "worst client": "表现最差的客户端",
    "best client": "表现最好的客户端",
    "uploaded": "上传总量",
    "downloaded": "下发总量",
    "sent by nodes": "节点发送总量",
    "sent": "上传",
    "received": "下发",
    "busiest end": "最繁忙节点",
    "gradients": "梯度计算次数",
    "simulated time": "模拟时间",
    "training": "训练耗时",
    "evaluation": "评估耗时",
    "recording": "写入耗时",
    "time": "总耗时",
    "setting": "参数",
    "runs": "所属运行",
    "value": "取值",
    "property": "属性",
    "What differs": "不同之处",
    "All settings": "全部参数",
    "All values": "全部环境信息",
    "No setting differs.": "各次运行的参数完全相同。",
    "All runs were made in the same environment.": "所有运行的环境完全相同。",
    "cells done": "已完成的实验",
    "time left": "预计剩余时间",
    "stopped after round": "已中断于轮次",
    "stopped; continue with": "已中断；继续运行",
    "continue with": "继续运行",
    "repeat the command": "重复原命令",
    # curves
    "Metric": "指标",
    "Grid": "网格位置",
    "Against": "横轴",
    "Smoothing": "平滑",
    "Zero-based axis": "纵轴从零开始",
    "Show all": "全部显示",
    "Hide all": "全部隐藏",
    "Lines": "曲线",
    "Data as a table": "以表格查看数据",
    "Split": "划分",
    "MB sent": "累计通信量（MB）",
    "simulated seconds": "模拟时间（秒）",
    "gradients of a batch": "梯度计算次数",
    "Bands show one standard deviation over seeds.": "阴影带表示各随机种子间的一个标准差。",
    "Every line is drawn with at most 400 points; curves.csv has all of them.": (
        "每条曲线最多绘制 400 个点，完整数据见 curves.csv。"
    ),
    "Use the arrow keys to move along the curves.": "可用方向键沿曲线移动。",
    "Sort by a column with its button. The lowest tenth of the clients is marked, for each method its own.": (
        "点击列名即可排序。每种方法各自表现最差的 10% 客户端已标出。"
    ),
    "Only the 500 worst clients are listed; clients.csv has all of them.": (
        "此处只列出表现最差的 500 个客户端，全部数据见 clients.csv。"
    ),
    "Only the first 24 splits are listed.": "此处只列出前 24 种划分。",
    "Only 100 of the clients are drawn, evenly spaced.": "图中均匀选取了 100 个客户端。",
    "Each bar is a client; colours are classes.": "每根柱子代表一个客户端，颜色代表类别。",
    "Each bar is a client; colours are bins of the target.": "每根柱子代表一个客户端，颜色代表目标值的分箱。",
    (
        "The common model on the common test set: rows are true classes, columns are predictions, shading is the share "
        "of the row."
    ): "公共模型在公共测试集上的结果：行为真实类别，列为预测类别，颜色深浅表示占该行的比例。",
    "true": "真实",
    "predicted": "预测",
    "link": "连接",
    "node": "节点",
    "links": "连接数",
    "Links of the first round.": "第一轮的连接。",
    "Charts need JavaScript; the tables below do not.": "图表需要启用 JavaScript；下方的表格不需要。",
    "What the numbers mean": "指标含义",
    "Notes": "说明",
    "This page is one file and needs no network.": "本页是单个文件，无需联网即可打开。",
    "Made with": "生成工具：",
    "Charts by Apache ECharts (Apache License 2.0).": "图表由 Apache ECharts 绘制（Apache License 2.0）。",
    "Licences": "许可证",
    "Live": "实时",
    "connection lost": "连接已断开",
    # partition and topology
    "rows per client": "每个客户端的样本数",
    "inequality of sizes (Gini)": "样本数不均衡度（基尼系数）",
    "{size_min:,} to {size_max:,}, median {size_median:,g}": "{size_min:,} 至 {size_max:,}，中位数 {size_median:,g}",
    "classes per client": "每个客户端的类别数",
    "{classes_min} to {classes_max} of {classes}, mean {classes_mean:.1f}": (
        "{classes_min} 至 {classes_max}（共 {classes} 个），平均 {classes_mean:.1f}"
    ),
    "effective classes per client": "每个客户端的有效类别数",
    "bins per client": "每个客户端的分箱数",
    "effective bins per client": "每个客户端的有效分箱数",
    "share of the largest bin": "最多分箱所占比例",
    "share of the largest class": "最多类别所占比例",
    "heterogeneity": "异质性",
    " of at most {:.2f}": "（最大 {:.2f}）",
    "nodes": "节点数",
    "neighbours": "邻居数",
    "connected": "是否连通",
    "preserves the mean": "是否保持均值",
    "psi": "psi（混合速度）",
    "psi of one step": "单步 psi（混合速度）",
    "spectral gap": "谱间隙",
    # privacy
    "unit": "保护单位",
    "relation": "相邻关系",
    "delta": "delta",
    "warning": "警告",
}
_CHINESE_PLACES = {
    "global/test": "服务器模型在公共测试集上",
    "global/train": "服务器模型在全部训练样本上",
    "global/flatness": "服务器模型附近的训练损失",
    "personal/pre_fit/test": "各客户端的模型在自己的留出样本上（本地训练前）",
    "personal/post_fit/test": "各客户端的模型在自己的留出样本上（本地训练后）",
    "participants/pre_fit/test": "当轮客户端训练前，在自己的留出样本上",
    "participants/post_fit/test": "当轮客户端训练后，在自己的留出样本上",
    "consensus/test": "网络的平均模型在公共测试集上",
    "consensus": "各节点模型之间的差异（混合后）",
    "consensus/pre_mix": "各节点模型之间的差异（混合前）",
    "nodes/test": "网络中各节点在公共测试集上",
    "global/validation": "服务器模型在所有客户端的验证样本上",
    "personal/pre_fit/validation": "各客户端的模型在自己的验证样本上（本地训练前）",
    "personal/post_fit/validation": "各客户端的模型在自己的验证样本上（本地训练后）",
    "consensus/validation": "网络的平均模型在所有客户端的验证样本上",
    "nodes/validation": "网络中各节点在所有客户端的验证样本上",
    "bytes": "通信",
    "work": "计算",
    "time": "模拟时钟",
    "privacy": "差分隐私",
}
_CHINESE_MEASURES = {
    "epsilon": "累计消耗的 epsilon",
    "accuracy": "分类正确的比例",
    "loss": "平均损失",
    "auc": "ROC 曲线下面积",
    "balanced_accuracy": "各类别召回率的均值",
    "f1_macro": "各类别 F1 的均值",
    "brier": "Brier 分数",
    "ece": "期望校准误差",
    "mae": "平均绝对误差",
    "rmse": "均方根误差",
    "r2": "决定系数 R²",
    "up": "累计上传字节数",
    "down": "累计下发字节数",
    "busiest": "最繁忙节点的累计字节数",
    "gradients": "累计梯度计算次数",
    "simulated": "累计模拟秒数",
    "distance": "各节点模型与平均模型的距离",
    "relative": "该距离与平均模型长度之比",
}
_CHINESE_SPREAD = {"_mean": "各客户端的算术平均", "_std": "各客户端的标准差", "_worst10": "最差 10% 客户端的均值"}

# Notes below tables and names of differences, as comparisons write them; {} is what differs from one to the other.
_CHINESE_SENTENCES = {
    "{} of the rows are {}, so accuracy hides the rest: measure evaluate.metrics=balanced_accuracy,auc": (
        "{} 的样本属于类别 {}，准确率会掩盖其余类别的表现：请用 evaluate.metrics=balanced_accuracy,auc 评估"
    ),
    (
        "{} of the rows are {}, so accuracy hides the rest: measure evaluate.metrics=balanced_accuracy,auc, and weigh "
        "classes with task.class_weights=balanced"
    ): (
        "{} 的样本属于类别 {}，准确率会掩盖其余类别的表现：请用 evaluate.metrics=balanced_accuracy,auc 评估，"
        "并用 task.class_weights=balanced 为各类别加权。"
    ),
    "{}: {} has changed since the run wrote it: its SHA-256 differs from manifest.json.": (
        "{}：{} 不是运行时写入的内容：其 SHA-256 与 manifest.json 中的不一致。"
    ),
    "{}: mean ± sample standard deviation over {} seeds; rank by the mean of the last ten evaluations.": (
        "{}：{} 个随机种子的均值 ± 样本标准差；按最后十次评估的均值排名。"
    ),
    "{}: values of {} seed; rank by the mean of the last ten evaluations.": (
        "{}：{} 个随机种子的结果；按最后十次评估的均值排名。"
    ),
    "p: not available for one seed; use more seeds to separate methods.": (
        "p 值：只有一个随机种子，无法计算；要区分各方法，请使用更多种子。"
    ),
    "p: paired t-test against {} over the seeds, two-sided, not corrected for many methods.": (
        "p 值：各种子上与 {} 的配对 t 检验（双侧），未作多重比较校正。"
    ),
    (
        "p: paired t-test against {} over the seeds, two-sided, not corrected for many methods; {} seeds are few, so a "
        "p-value says little here."
    ): "p 值：各种子上与 {} 的配对 t 检验（双侧），未作多重比较校正；只有 {} 个种子，p 值参考意义有限。",
    (
        "Evaluations of a run: only {}; the mean of the last ten is the mean of the whole curve, and "
        "favours methods that learn fast at first. More rounds, or a smaller evaluate.every, give more."
    ): (
        "每次运行只评估了 {} 次：“最后十次均值”是整条曲线的均值，对前期收敛快的方法有利。"
        "增加轮数或减小 evaluate.every 可得到更多评估。"
    ),
    (
        "Evaluations of a run: only {}; the mean of the last ten is the mean of most of the curve, and "
        "favours methods that learn fast at first. More rounds, or a smaller evaluate.every, give more."
    ): (
        "每次运行只评估了 {} 次：“最后十次均值”是大半条曲线的均值，对前期收敛快的方法有利。"
        "增加轮数或减小 evaluate.every 可得到更多评估。"
    ),
    (
        "Evaluations of a run: only {}; the mean of the last ten is the mean of most of the curve, or all of it, and "
        "favours methods that learn fast at first. More rounds, or a smaller evaluate.every, give more."
    ): (
        "每次运行只评估了 {} 次：“最后十次均值”是大半条甚至整条曲线的均值，对前期收敛快的方法有利。"
        "增加轮数或减小 evaluate.every 可得到更多评估。"
    ),
    (
        "Evaluations of a run: {}; the last ten are at other shares of training for one than for the other, so compare "
        "'last', too."
    ): "每次运行的评估次数：{}；最后十次评估处于训练的不同阶段，请同时比较最终值。",
    "Methods are evaluated at different moments of a round, as the metric's name says.": (
        "各方法在一轮中的评估时刻不同，见指标名称。"
    ),
    "The methods share no accuracy: only those with the baseline's metric are ranked and tested.": (
        "各方法没有共同的准确率指标：只对与基线指标相同的方法排名和检验。"
    ),
    "validation: on rows used neither for training nor for the test; * marks the choice.": (
        "validation：在既未用于训练、也不在测试集中的样本上；* 为据此选出的设置。"
    ),
    'validation: on rows used neither for training nor for the test; "chosen" marks the choice.': (
        "验证集：既未用于训练、也不在测试集中的样本；标有“选定”的是据此选出的设置。"
    ),
    'Until the target: at the first evaluation that reaches it; "-" where some seeds never do.': (
        "达到目标：首次达到目标的评估；“-”表示有种子始终未达到。"
    ),
    "Equal {}: each method trains for as many rounds as {} gradients of a batch allow; {}": (
        "等量对比（{}）：每个方法训练的轮数由 {} 次批梯度计算决定；表中的轮数、梯度次数和 MB 为实际花费。"
    ),
    "Equal {}: each method trains for as many rounds as {} MB sent by all together allow; {}": (
        "等量对比（{}）：每个方法训练的轮数由总通信量 {} MB 决定；表中的轮数、梯度次数和 MB 为实际花费。"
    ),
    "Equal {}: each method trains for as many rounds as {} MB through the busiest end allow; {}": (
        "等量对比（{}）：每个方法训练的轮数由最繁忙一端的通信量 {} MB 决定；表中的轮数、梯度次数和 MB 为实际花费。"
    ),
    "{} spends none of it, and keeps the rounds of the experiment.": "{} 不消耗该资源，轮数与实验设置相同。",
    "{} spent {} of the budget: rounds are counted for the first seed, and seeds differ.": (
        "{0} 用去预算的 {1}：轮数按第一个种子计算，而各种子有所不同。"
    ),
    "{} spent {} of the budget: how much it trains is known only after training.": (
        "{} 实际花费为预算的 {}：训练量在训练之后才知道。"
    ),
    "{} spent {} of the budget: one round already exceeds it.": "{} 实际花费为预算的 {}：一轮就已超出预算。",
    "{} spent {} of the budget: one more round would exceed it.": "{} 实际花费为预算的 {}：再多一轮就会超出预算。",
    "A method that did not finish with every seed is not ranked; its values are those of the other seeds.": (
        "有种子未完成的方法不参与排名；其数值来自其余种子。"
    ),
    "paper: the value that the paper reports, not one that was measured here.": "paper：论文报告的数值，并非本次测得。",
    "gain of {}: relative to the best of {} in the same column.": "gain of {}：相对于同一列中 {} 里最优者的提升。",
    "epsilon: other seeds assign the same data to other clients; all of them reveal something about an example.": (
        "epsilon：其他种子将同样的数据分给不同的客户端；它们都会透露样本的部分信息。"
    ),
    "epsilon: {} at delta {}, for each {} ({}).": "epsilon：{}，delta 为 {}，单位为每个 {}（{}）。",
    "epsilon: {}; {} cells on the same data add up to epsilon {} at delta {}, for each {} ({}).": (
        "epsilon：{}；同一数据上的 {} 次运行合计 epsilon {}，delta 为 {}，单位为每个 {}（{}）。"
    ),
    (
        "chosen: for each method the {} with the best {} (the mean of its last evaluations, ten at most, over all "
        "seeds; the test rows are not used for the choice)."
    ): "选择方式：对每个方法，取 {} 中 {} 最优者（所有种子上最后至多十次评估的均值）；测试样本不参与选择。",
    "chosen: the best {} of {} is the largest that was tried ({}).": "{1} 选定的 {0} 是所试各值中最大的（{2}）。",
    "chosen: the best {} of {} is the smallest that was tried ({}).": "{1} 选定的 {0} 是所试各值中最小的（{2}）。",
    "{}: nothing to choose from, since no grid point finished with every seed.": (
        "{}：没有任何设置在所有种子上完成，无从选择。"
    ),
    "{} of {} cells are missing: the comparison has not ended": "对比尚未结束：{} / {} 次运行尚无结果",
    (
        "moved {} of {} rows from the largest clients to {} of {} that had no rows; "
        "this changes label mixes: heterogeneity was {} and is {}"
    ): (
        "从最大的客户端移出 {}（共 {}）个样本，补给 {}（共 {}）个没有样本的客户端；"
        "标签分布随之改变：异质性由 {} 变为 {}"
    ),
    (
        "moved {} of {} rows from the largest clients to {} of {} that had fewer than {} rows; "
        "this changes label mixes: heterogeneity was {} and is {}; set partition.min_size=1 to keep the split"
    ): (
        "从最大的客户端移出 {}（共 {}）个样本，补给 {}（共 {}）个样本少于 {} 个的客户端；"
        "标签分布随之改变：异质性由 {} 变为 {}；设置 partition.min_size=1 可保留原划分"
    ),
    (
        "moved {} of {} rows from the largest clients to {} of {} that had fewer than {} rows; "
        "this changes label mixes: heterogeneity was {} and is {}; set partition.min_size=1 to move only {}"
    ): (
        "从最大的客户端移出 {}（共 {}）个样本，补给 {}（共 {}）个样本少于 {} 个的客户端；"
        "标签分布随之改变：异质性由 {} 变为 {}；设置 partition.min_size=1 则只移动 {} 个"
    ),
    "partition: {}": "数据划分：{}",
    "partition (numbers of seed {}): {}": "数据划分（数值为种子 {} 的）：{}",
    "partition ({}; numbers of seed {}): {}": "数据划分（{}；数值为种子 {} 的）：{}",
    "partition ({}): {}": "数据划分（{}）：{}",
    "range of {} - of {}, {} points": "{} 的极差 - {} 的极差，{} 处",
    "{} - paper": "{} - 论文数值",
    "{} - paper ({})": "{} - 论文数值（{}）",
}


def sentence_in(language: Language, sentence: str) -> str:
    """A sentence that a comparison wrote; in English if no translation is known, as for text of a recipe.

    It may contain another one, such as a note about a partition.
    """
    if language == "en":
        return sentence
    for pattern, chinese in _patterns():
        found = pattern.fullmatch(sentence)
        if found:
            return chinese.format(*(NUMERALS.get(word, sentence_in(language, word)) for word in found.groups()))
    return sentence


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Each English sentence as a pattern that matches the text at its {}."""
    return tuple(
        (re.compile("(.+?)".join(map(re.escape, english.split("{}")))), chinese)
        for english, chinese in {**_CHINESE_SENTENCES, **CHINESE_CLAIMS}.items()
    )


def speaker(language: Language) -> Say:
    """A function that translates a phrase of the page into this language."""
    if language == "en":
        return lambda phrase: phrase
    return lambda phrase: _CHINESE.get(phrase, phrase)


def meaning_in(language: Language, metric: str) -> str:
    """What a metric measures; empty for names that only an algorithm knows."""
    place, _, end = metric.rpartition("/")
    quantity = next((words for begins, words in _CHINESE_MEASURES.items() if end.startswith(begins)), "")
    found = meaning(metric)
    if language == "en" or not found or place not in _CHINESE_PLACES or not quantity:
        return found
    spread = next((_CHINESE_SPREAD[ending] for ending in SPREAD if end.endswith(ending)), "")
    return f"{_CHINESE_PLACES[place]}：{quantity}" + (f"，{spread}" if spread else "")
