"""Claims of papers in Chinese: the sentences of the recipes in experiments/, with {} for methods, data and numbers.

The first sentence that matches is used, so a longer one comes before a shorter one that it contains.
"""

from __future__ import annotations

CHINESE_CLAIMS = {
    # -- better, best, worst
    "{} is the weakest: {} is above it with {} corrupted clients": "{0} 最弱：{2} 的客户端被污染时，{1} 高于它",
    "{} is better than the {} other baselines with {} corrupted clients on {}": (
        "{2} 的客户端被污染时，{0} 在 {3} 上优于其余{1}种基线方法"
    ),
    "{} is better than the {} other methods with {} corrupted clients on {}": (
        "{2} 的客户端被污染时，{0} 在 {3} 上优于其余{1}种方法"
    ),
    "{} is clearly better than the {} other methods on {}": "{0} 在 {2} 上明显优于其余{1}种方法",
    "{} is better than the {} other baselines on {}": "{0} 在 {2} 上优于其余{1}种基线方法",
    "{} is better than the {} other methods on {}": "{0} 在 {2} 上优于其余{1}种方法",
    "{} is better than the other methods at {}, read as {}": "{0} 在 {1}（按 {2} 理解）时优于其他方法",
    "{} is better than the other methods at {}": "{0} 在 {1} 时优于其他方法",
    "{} is better than all {} other methods on {} at {}": "{0} 在 {2} 上、{3} 时优于其余全部{1}种方法",
    "{} is better than all {} other methods at {}": "{0} 在 {2} 时优于其余全部{1}种方法",
    "{} is better than {} in setting {} at {}": "在设置 {2}、{3} 时，{0} 优于 {1}",
    "{} is better than {} in setting {}": "在设置 {2} 中，{0} 优于 {1}",
    "{} is better than {} and {} on {} at {}, read as {}": "{0} 在 {3} 上、{4}（按 {5} 理解）时优于 {1} 和 {2}",
    "{} is better than {} and {} on {} at {}": "{0} 在 {3} 上、{4} 时优于 {1} 和 {2}",
    "{} is better than {} and {} on {}": "{0} 在 {3} 上优于 {1} 和 {2}",
    "On {} {} is better at {} than at {}": "在 {0} 上，{1} 在 {2} 时优于 {3} 时",
    "{} is better at {} than at {}": "{0} 在 {1} 时优于 {2} 时",
    "{} is a little worse at {} than at {}": "{0} 在 {1} 时略差于 {2} 时",
    "{} is worse at {} than at {}": "{0} 在 {1} 时差于 {2} 时",
    "{} is best in setting {} and worst in setting {}": "{0} 在设置 {1} 中最好，在设置 {2} 中最差",
    "{} is best, {} second and {} worst on {}": "在 {3} 上，{0} 最好，{1} 次之，{2} 最差",
    "{} ends above all {} other methods on {} at {}": "{0} 在 {2} 上、{3} 时最终高于其余全部{1}种方法",
    # -- accuracy and AUC
    "{} is about one point more accurate than {}": "{0} 的准确率比 {1} 高约一个百分点",
    "{} is more accurate than the {} other methods on {}": "{0} 在 {2} 上的准确率高于其余{1}种方法",
    "{} is more accurate than the {} other methods": "{0} 的准确率高于其余{1}种方法",
    "{} is more accurate than {} on {}": "{0} 在 {2} 上的准确率高于 {1}",
    "{} is more accurate than {}": "{0} 的准确率高于 {1}",
    "{} has a higher accuracy than {}": "{0} 的准确率高于 {1}",
    "{} has a higher AUC than {}": "{0} 的 AUC 高于 {1}",
    "{} is {} points above {} with static weights": "{0} 比使用静态权重的 {2} 高 {1} 个百分点",
    "{} with learned weights is {} points above {} with fixed ones": (
        "使用学习所得权重的 {0} 比使用固定权重的 {2} 高 {1} 个百分点"
    ),
    "{} gains {} % over {} on {} at {}, read as {}": "{0} 在 {3} 上、{4}（按 {5} 理解）时比 {2} 提高 {1} %",
    "{} gains {} % over {} at {}, read as {}": "{0} 在 {3}（按 {4} 理解）时比 {2} 提高 {1} %",
    "{} gains {} % over {} on {} at {}": "{0} 在 {3} 上、{4} 时比 {2} 提高 {1} %",
    "{} gains {} % over {} at {}": "{0} 在 {3} 时比 {2} 提高 {1} %",
    # -- values that a paper reports
    "With gamma {}, {} has the accuracies of the table on {}, within one point": (
        "gamma 为 {0} 时，{1} 在 {2} 上的准确率与论文表格相差不超过一个百分点"
    ),
    "{} with ASGD has the accuracy of the table on {}, within one point": (
        "使用 ASGD 的 {0} 在 {1} 上的准确率与论文表格相差不超过一个百分点"
    ),
    "{} has the accuracies of the table on {}, within one point": (
        "{0} 在 {1} 上的各准确率与论文表格相差不超过一个百分点"
    ),
    "{} has the accuracy of the table on {}, within one point": "{0} 在 {1} 上的准确率与论文表格相差不超过一个百分点",
    "{} reaches {} % in setting {} at {}, within one point": (
        "在设置 {2}、{3} 时，{0} 达到 {1} %，相差不超过一个百分点"
    ),
    "{} reaches {} % on {} at {}, within one point": "{0} 在 {2} 上、{3} 时达到 {1} %，相差不超过一个百分点",
    "{} reaches {} % on {}, within one point": "{0} 在 {2} 上达到 {1} %，相差不超过一个百分点",
    "{} reaches {} % at {}, within one point": "{0} 在 {2} 时达到 {1} %，相差不超过一个百分点",
    "{} reaches {} %, within one point": "{0} 达到 {1} %，相差不超过一个百分点",
    # -- how fast, how steady, at what cost
    "{} converges in the fewest rounds ({}), then {} ({}), fixed weights ({}), {} and {}": (
        "{0} 收敛所需轮数最少（{1}），其次是 {2}（{3}）、固定权重（{4}）、{5} 和 {6}"
    ),
    "{}'s speed depends less on the setting than {}'s at {}": "在 {2} 时，{0} 的收敛速度比 {1} 更少依赖设置",
    "{} ends closer together in the {} settings than {} at {}": "在 {3} 时，{0} 在{1}种设置下的最终结果比 {2} 更接近",
    "{} sends less than the {} other methods until it has learned (here: until {} %)": (
        "{0} 在学会之前（此处：达到 {2} % 之前）发送的数据少于其余{1}种方法"
    ),
    "{} converges in fewer rounds than the {} other methods": "{0} 收敛所需轮数少于其余{1}种方法",
    "{} converges faster than all {} other methods on {} at {}": "{0} 在 {2} 上、{3} 时比其余全部{1}种方法收敛更快",
    "{} converges faster than all {} other methods at {}": "{0} 在 {2} 时比其余全部{1}种方法收敛更快",
    "{} converges faster than {} in setting {} at {}": "在设置 {2}、{3} 时，{0} 比 {1} 收敛更快",
    "On {} {} converges faster at {} than at {}": "在 {0} 上，{1} 在 {2} 时比在 {3} 时收敛更快",
    "{} converges faster at {} than at {}": "{0} 在 {1} 时比在 {2} 时收敛更快",
    "{} takes less time than the {} other baselines on {}": "{0} 在 {2} 上用时少于其余{1}种基线方法",
    "{} takes less time than the {} other methods on {}": "{0} 在 {2} 上用时少于其余{1}种方法",
    "Clients of {} send less in a round than those of the {} other methods": (
        "{0} 的客户端每轮上传的数据少于其余{1}种方法"
    ),
    "The accuracy of {} rises faster than that of {} on {}": "在 {2} 上，{0} 的准确率比 {1} 上升更快",
    "The loss of {} falls faster than that of {} on {}": "在 {2} 上，{0} 的损失比 {1} 下降更快",
    "{} is steadier than {} on {}: its accuracy swings less at the end": (
        "{0} 在 {2} 上比 {1} 更稳定：末期准确率波动更小"
    ),
    "{} is steadier than {} on {}: its loss rises less on the way": "{0} 在 {2} 上比 {1} 更稳定：训练中损失回升更少",
    # -- what it depends on
    "{}: SGD, ASGD and AdaGrad are better than the other four on {}": (
        "{0}：在 {1} 上，SGD、ASGD 和 AdaGrad 优于其余四种优化器"
    ),
    "{}: SGD and ASGD are better than Adam": "{0}：SGD 和 ASGD 优于 Adam",
    "{}: Adam is the worst optimizer": "{0}：Adam 是最差的优化器",
    "With {} the accuracy depends less on the learning rate than with {} on {}": (
        "在 {2} 上，使用 {0} 时准确率对学习率的依赖小于 {1}"
    ),
    "{} depends less on the optimizer than {}": "{0} 对优化器的依赖小于 {1}",
    "{} depends less on the setting than {} at {} ({} points against {})": (
        "在 {2} 时，{0} 对设置的依赖小于 {1}（相差 {3} 对 {4} 个百分点）"
    ),
    "{} depends less on the setting than {} ({} points against {})": (
        "{0} 对设置的依赖小于 {1}（相差 {2} 对 {3} 个百分点）"
    ),
    "{} rises from {} to {} local iterations on {}": "本地迭代从 {1} 次增至 {2} 次时，{0} 在 {3} 上的准确率上升",
    "{} falls as the share of corrupted clients grows": "被污染客户端的比例越大，{0} 的准确率越低",
    "{} falls by two points from {} to {} on {}": "从 {1} 到 {2}，{0} 在 {3} 上下降两个百分点",
    "From gamma {} on, accuracy falls on {}, whatever the net": "gamma 从 {0} 起，无论哪种网络，{1} 上的准确率都下降",
    "Of all gamma, {} is best on {}, whatever the net": "在所有 gamma 中，{0} 在 {1} 上最好，无论哪种网络",
    "Accuracy is highest at gamma {} on {}, whatever the net": "gamma 为 {0} 时，{1} 上的准确率最高，无论哪种网络",
    # -- weights and curvature
    "The largest eigenvalue of the Hessian is smaller with {} than with {}": "{0} 的 Hessian 最大特征值小于 {1}",
    "The largest eigenvalue is smaller with {} than with {}": "{0} 的最大特征值小于 {1}",
    "The variance of gradients is smaller with {} than with {}": "{0} 的梯度方差小于 {1}",
    "The eigenvalue of {} is larger at {} than at {} on {}": "在 {3} 上，{0} 的特征值在 {1} 时大于 {2} 时",
    "The weights of clients vary most with {}, then with {}, and not at all with fixed weights": (
        "客户端权重的变化以 {0} 最大，{1} 次之，固定权重则不变"
    ),
    "A malicious client has {} less weight with learned weights than with fixed ones": (
        "使用学习所得权重时，恶意客户端的权重比使用固定权重时小 {0}"
    ),
    "{} gives malicious clients less weight than {}, {} and {}": "{0} 给恶意客户端的权重小于 {1}、{2} 和 {3}",
    "{} gives malicious clients the least weight, then {}, {}, {} and {}": (
        "{0} 给恶意客户端的权重最小，其次是 {1}、{2}、{3} 和 {4}"
    ),
}
NUMERALS = {"four": "四", "five": "五", "six": "六", "seven": "七"}
